"""Many runs of one command, on this machine or on a cluster.

``queue`` has the jobs, and ``driver`` starts them and waits for their ends. They run as
``processes`` of this machine, or as the jobs of ``slurm``, which ``squeue`` lists.
"""
