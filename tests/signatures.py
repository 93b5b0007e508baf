"""The type checker that a thorough test run applies to every function of the package."""

from typing import Self

from beartype import BeartypeConf, FrozenDict, beartype

# The import hook decorates methods one by one, where beartype cannot know the class that Self stands for.
check = beartype(conf=BeartypeConf(hint_overrides=FrozenDict({Self: object})))
