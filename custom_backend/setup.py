"""The part of the package pipe that pip has to compile; pyproject.toml holds everything else."""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

setup(
    ext_modules=[CppExtension("pipe.compiled", ["pipe/backend.cpp"], depends=["pipe/pipe.h"])],
    cmdclass={"build_ext": BuildExtension},  # adds the flags with which torch itself was compiled
)
