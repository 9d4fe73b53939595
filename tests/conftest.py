"""Do the judge and the reference themselves hold? `@pytest.mark.clause("ERR-2")` names a clause that is judged here."""

import os

# the interpreter of Triton and the small products of the judge are faster on one thread; read when numpy is loaded
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_configure(config):
    config.addinivalue_line("markers", "clause(id): the clause that a test of the suite itself judges")
