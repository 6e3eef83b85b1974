"""Certificates of exported networks from proved Lipschitz constants: radii of classifiers, deviations of outputs."""

from lipkit.certificates import lipsdp as lipsdp
from lipkit.certificates.certificate import Certificate, certify
from lipkit.certificates.dense_outputs import DenseCertificate, dense
from lipkit.certificates.gains import gain_matrix, local_gain, tight
from lipkit.certificates.measurement import Proof, prove
from lipkit.certificates.monotonicity import monotone
from lipkit.certificates.properties import Answer, verify_property
from lipkit.certificates.ranking import AurocCertificate, auroc
from lipkit.certificates.regression import RegressionCertificate, certify_regression
from lipkit.certificates.vnnlib import read_vnnlib
from lipkit.text import format_radius

__all__ = ["Certificate", "Proof", "certify", "format_radius", "prove"]  # of classifiers
__all__ += ["AurocCertificate", "DenseCertificate"]  # of regressions, decisions, detectors
__all__ += ["RegressionCertificate", "auroc", "certify_regression", "dense"]
__all__ += ["Answer", "gain_matrix", "lipsdp", "local_gain", "monotone"]  # gains, properties
__all__ += ["read_vnnlib", "tight", "verify_property"]

__dir__ = __all__.copy
