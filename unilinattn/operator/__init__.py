"""`MixerOperator`, one layer as a frozen linear map between tokens, and the parts that it is made of."""

from unilinattn.operator.flow import Flow
from unilinattn.operator.operator import MixerOperator

__all__ = ["Flow", "MixerOperator"]
