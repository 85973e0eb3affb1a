"""Stands in for torchvision, whose published builds want a CUDA torch of their own release.

SGLang imports it for the configurations of models that see; a model of text never gets to use it.
"""
