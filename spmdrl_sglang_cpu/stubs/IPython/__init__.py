"""Stands in for IPython, which SGLang imports for a progress display in notebooks."""


def get_ipython():
    """This is not a notebook. tqdm, matplotlib and others ask once they see that IPython is there."""
    return None


# matplotlib asks an IPython that is loaded how it is to find its backend; from this release on, it need not do a thing.
version_info = (8, 24, 0)
