"""Certificates of exported networks from proved Lipschitz constants: radii of classifiers, deviations of outputs."""

from lipkit.certificates import lipsdp as lipsdp
from lipkit.certificates.certificate import Certificate, certify
from lipkit.certificates.dense_outputs import DenseCertificate, dense
from lipkit.certificates.gains import gain_matrix, local_gain, tight
from lipkit.certificates.measurement import Proof, prove
from lipkit.certificates.properties import Answer, monotone, verify_property
from lipkit.certificates.ranking import AurocCertificate, auroc
from lipkit.certificates.regression import RegressionCertificate, certify_regression
from lipkit.certificates.vnnlib import read_vnnlib
from lipkit.text import format_radius

__all__ = [
    "Answer",
    "AurocCertificate",
    "Certificate",
    "DenseCertificate",
    "Proof",
    "RegressionCertificate",
    "auroc",
    "certify",
    "certify_regression",
    "dense",
    "format_radius",
    "gain_matrix",
    "lipsdp",
    "local_gain",
    "monotone",
    "prove",
    "read_vnnlib",
    "tight",
    "verify_property",
]

__dir__ = __all__.copy
