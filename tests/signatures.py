"""The checker of signatures that the test run puts around every function of the package."""

from typing import Self

from beartype import BeartypeConf, FrozenDict, beartype

# The import hook decorates methods one by one, where beartype cannot know the class that Self stands for.
check = beartype(conf=BeartypeConf(hint_overrides=FrozenDict({Self: object})))
