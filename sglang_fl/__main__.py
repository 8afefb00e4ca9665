"""``python -m sglang_fl``."""

if __name__ == "__main__":
    try:
        from sglang_fl.cli import main

        main()
    except KeyboardInterrupt:  # before click could see it
        raise SystemExit(130) from None
