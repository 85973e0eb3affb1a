"""Stands in for IPython, which SGLang imports for a progress display in notebooks."""


def get_ipython():
    """This is not a notebook. tqdm, matplotlib and others ask once they see that IPython is there."""
    return None
