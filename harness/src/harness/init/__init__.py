"""Start a training from the weights of any checkpoint, and freeze parts of the module."""
