"""What a GPU computes, beside the same on the CPU: ``make test-gpu``.

``TEST_DEVICE=cpu make test-gpu`` runs the same cases with the CPU in the place of the GPU, for one
who changes them without having a GPU. What only a GPU can show is left out there.
"""
