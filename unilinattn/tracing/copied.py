"""`Copied`: objects that can be copied, with the model in a deep copy, and not pickled."""

import copy
from typing import Any, NoReturn, Self

from unilinattn.errors import UncoveredError


class Copied:
    """A class whose objects refer to a running model's functions, which `copy` shares and `pickle` cannot write."""

    def __copy__(self) -> Self:
        """Return another object with the same attributes."""
        return self._with(vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an object with copies of the attributes, of the model too."""
        memo[id(self)] = other = self._with({})
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise `UncoveredError`: an object of this class cannot be pickled."""
        raise UncoveredError(
            f"a {type(self).__name__} cannot be pickled, since it refers to functions of the model. Save the results "
            "(`result.save(path)`), and trace the model again where it is needed."
        )

    def _with(self, attributes: dict[str, Any]) -> Self:
        other = object.__new__(type(self))
        vars(other).update(attributes)
        return other
