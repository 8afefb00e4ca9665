#!/bin/sh
# Makes sure that valgrind is there: installs it where that is possible, says what to do where it is not.
command -v valgrind >/dev/null && exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "installing valgrind with apt-get"
    apt-get update >/dev/null && apt-get install -y valgrind >/dev/null && exit 0
fi
echo "valgrind is missing: install the package valgrind of your distribution (apt-get install valgrind," \
    "dnf install valgrind) and run make sanitize again" >&2
exit 1
