"""FlagOS plugin for SGLang: its version and the two functions that SGLang's entry points name."""

__version__ = "0.1.0"


def load_plugin() -> None:
    """Entry point of the group ``sglang.srt.plugins``; see :func:`sglang_fl.plugin.load_plugin`."""
    from sglang_fl.plugin import load_plugin as load

    load()


def activate_platform() -> str | None:
    """Entry point of the group ``sglang.srt.platforms``; see :func:`sglang_fl.plugin.activate_platform`."""
    from sglang_fl.plugin import activate_platform as activate

    return activate()
