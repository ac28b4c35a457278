"""What training begins with: weights of any checkpoint, and parts of the module that are frozen."""
