"""References of kernels, in plain torch: `<wrapper>_reference` computes the same as the wrapper of a kernel.
A module has the references of the folder of `drift_sdk._kernels` with its name.

References that the eager executor uses stay in the package: `execution.eager.sampling`.
"""
