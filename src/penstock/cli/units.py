"""Numbers as short texts: sizes, counts and times."""

_SIZES = ("bytes", "kB", "MB", "GB", "TB", "PB")
_COUNTS = ("", "k", "M", "G", "T")


def size_text(num_bytes: float) -> str:
    """A number of bytes with three digits and a decimal unit.

    >>> size_text(999), size_text(1_234_567), size_text(45_600_000_000)
    ('999 bytes', '1.23 MB', '45.6 GB')
    """
    return _scaled(num_bytes, _SIZES)


def count_text(number: float) -> str:
    """A count with at most three digits and a unit.

    >>> count_text(7), count_text(65_536), count_text(1e9)
    ('7', '65.5k', '1G')
    """
    return _scaled(number, _COUNTS).replace(" ", "")


def estimate_text(number: int | None, *, is_exact: bool) -> str:
    """Return a number with commas; with "about" if it is not exact, and "?" if it is not known.

    >>> estimate_text(1234, is_exact=False)
    'about 1,234'
    """
    if number is None:
        return "?"
    return f"{number:,}" if is_exact else f"about {number:,}"


def duration_text(seconds: float) -> str:
    """A duration in milliseconds or seconds; from a minute on, as on a clock.

    >>> duration_text(0.0421), duration_text(2.26), duration_text(75), duration_text(7_300)
    ('42 ms', '2.3 s', '1:15', '2:01:40')
    """
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 59.95 else clock_text(seconds)


def clock_text(seconds: float) -> str:
    """A duration as minutes and seconds, with hours if there are any.

    >>> clock_text(7), clock_text(3_600)
    ('0:07', '1:00:00')
    """
    # The time is rounded before it is divided: 59.7 seconds are 1:00, not 0:60.
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number_of(number: int, thing: str) -> str:
    """A number and a noun, in the plural unless the number is 1.

    >>> number_of(1, "part"), number_of(1_200, "blank record")
    ('1 part', '1,200 blank records')
    """
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def _scaled(number: float, units: tuple[str, ...]) -> str:
    # 999.5 would be rounded to "1000", which has four digits, so the next unit is used.
    for power, unit in enumerate(units):
        scaled = number / 1000**power
        if scaled < 999.5 or unit == units[-1]:
            break
    # The limits are those at which rounding adds a digit: 99.95 becomes "100", 9.995 "10.0".
    digits = 0 if power == 0 or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    text = f"{scaled:,.{digits}f}"
    if "." in text and units is _COUNTS:
        text = text.rstrip("0").rstrip(".")
    return f"{text} {unit}"
