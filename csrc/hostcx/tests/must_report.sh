#!/bin/sh
# Runs a build with a planted fault: the tool must fail and say the words, or this fails.
# FAULT: its name. REPORT: the words. LOG: where the output goes. The rest: the command.
"$@" >"$LOG" 2>&1
status=$?
if [ "$status" -eq 0 ]; then
    cat "$LOG"
    echo "the planted fault $FAULT was not reported: the run succeeded" >&2
    exit 1
fi
if ! grep -q "$REPORT" "$LOG"; then
    cat "$LOG"
    echo "the planted fault $FAULT was not reported: no \"$REPORT\" in the output above" >&2
    exit 1
fi
echo "== planted fault $FAULT: reported ($(grep -m 1 -o "$REPORT.*" "$LOG"))"
