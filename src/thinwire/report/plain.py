"""Text of files and peers for rich: it is shown, and neither styles nor moves anything."""

from rich.text import Text

from thinwire.text import printable


def plain(text: object, style: str = "") -> Text:
    """rich takes a string for markup ([red], [link=...]), a Text as it is."""
    return Text(printable(text), style)
