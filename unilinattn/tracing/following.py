"""The modules between a layer's output and the stream, such as norms and scales, as stages."""

from collections.abc import Sequence
from functools import partial

from jaxtyping import Float
from torch import Tensor

from unilinattn.architectures.recorded import recorded_stages
from unilinattn.call import Call
from unilinattn.call.axes import Axes, as_read
from unilinattn.errors import UncoveredError
from unilinattn.host.isolation import in_gradient_mode, isolated
from unilinattn.host.module_calls import Following
from unilinattn.kernels.precision import full_precision
from unilinattn.operator.stages import Chain


def stages_after(
    following: Sequence[Following], output: Float[Tensor, "batch query out"], axis: int
) -> tuple[Chain, Float[Tensor, "batch query out"]]:
    """Return the frozen stages of the modules that follow a layer, and the tensor that the last one adds to the stream.

    `axis` is that of the channels in the layer's output; a module may make the tokens of an image, whose last it is.

    Raises `UncoveredError` with the function of a module that is no stage, and for a module whose stages read other
    tokens too.
    """
    stages: Chain = ()
    for each in following:
        axes = Axes(axis, axis if each.output.ndim == each.input.ndim else -1)
        pairs = zip((each.input, each.output), axes, strict=True)
        entered, left = (as_read(tensor.detach().to(output), output.shape, along) for tensor, along in pairs)
        # Without an output: the module may add the stream to what it returns.
        call = Call(each.module, each.name, each.arguments, entered, axes=axes)
        with full_precision():
            flow = in_gradient_mode(False, partial(isolated, each.module, partial(recorded_stages, call)))
        others = [port for port, chain in flow.chains.items() if chain and port != "x"]
        if others:
            raise UncoveredError(
                f"{each.name} ({type(each.module).__qualname__}) adds stages of its argument {others[0]!r} to what it "
                "makes of the layer's output, so the tensor that is added to the stream is not the layer's alone."
            )
        stages, output, axis = (*stages, *flow.chains["x"]), left, axes.output
    return stages, output
