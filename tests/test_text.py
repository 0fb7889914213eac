from thinwire.text import printable


def test_what_moves_the_cursor_is_shown() -> None:
    assert printable("a\x1b[2J\x07b\r\x9b31m") == "a\\x1b[2J\\x07b\\r\\x9b31m"
    assert printable("a\u202eb\u2066") == "a\\u202eb\\u2066"  # writing from right to left
    assert printable("\udc80") == "\\udc80"  # half of a name that is no UTF-8
    printable("\udc80").encode()


def test_all_else_is_left_as_it_is() -> None:
    for text in ("", "ddp", "two\nlines\tand a tab", "±0.5 µs", "语言", "[red]x[/]"):
        assert printable(text) == text
