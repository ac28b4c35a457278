"""Results on a GPU equal those on the CPU: ``make test-gpu``.

``TEST_DEVICE=cpu make test-gpu`` runs the same tests with the CPU in place of the GPU, for
developers without a GPU. It leaves out tests that need a GPU.
"""
