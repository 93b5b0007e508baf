"""`occlusion`: the drop of a logit when tokens' vectors are replaced, by captum."""

from types import ModuleType

from torch import Tensor

from unilinattn.errors import OptionError
from unilinattn.options import Occlusion
from unilinattn.scoring.numbers import Scores, TokenFunction, captum_method


@captum_method(Occlusion, every_query=False)
def occlusion(function: TokenFunction, options: Occlusion, captum: ModuleType) -> Scores:
    """Run `Occlusion`."""

    def drops(row: int) -> Tensor:
        count = int(function.real[row].sum())
        if options.window > count:
            raise OptionError(f"occlusion: window={options.window} is longer than the {count} tokens.")
        values: Tensor = captum.Occlusion(function.of_presence(options.baseline, row)).attribute(
            function.vectors.new_ones(1, count),
            (options.window,),
            additional_forward_args=(function.rows[row : row + 1],),
            perturbations_per_eval=function.runs(gradients=False),
        )
        return values.squeeze(0)

    return Scores(function.each_row(drops))
