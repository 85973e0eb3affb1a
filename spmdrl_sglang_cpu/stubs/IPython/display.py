"""The two names that `sglang.utils` imports."""

HTML = str


def display(*objects, **options):
    """Show nothing."""
