"""Models in wrappers, compiled, replicated, sharded or offloaded."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.setups.harness import EVERY, HOSTS, each, setup, works
from unilinattn import trace
from unilinattn.errors import InputError, ModelStateError
from unilinattn.testing.hosts import Host


class PassesOn(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor, **kwargs: object) -> object:
        return self.inner(*args, **kwargs)


class PassesPositions(PassesOn):
    def forward(self, *args: Tensor) -> object:
        return self.inner(*args)


def wrapped(wrap, names: tuple[str, ...] = EVERY) -> float:
    def one(host: Host) -> float:
        ids, plain = host.inputs(), host.model()
        model = wrap(host.model())
        return works(model, ids, lambda: model(ids), like=(plain, ids))

    return each(one, names)


@setup("torch.compile", "`torch.compile(model)`, called before the trace")
def compiled() -> float:
    # Compiling Mamba's loop over tokens takes a minute.
    return wrapped(lambda model: torch.compile(model, backend="eager"), ("Mamba-2", "Llama"))


@setup("compiled in place", "`model.compile()`, called before the trace")
def compiled_in_place() -> float:
    def compile_in_place(model: nn.Module) -> nn.Module:
        model.compile(backend="eager")
        return model

    return wrapped(compile_in_place, ("Mamba-2", "Llama"))


@setup("a compiled block", "`model.model.layers[0] = torch.compile(model.model.layers[0])`")
def compiled_block() -> float:
    def compile_block(model: nn.Module) -> nn.Module:
        layers = (model.backbone if hasattr(model, "backbone") else model.model).layers
        layers[0] = torch.compile(layers[0], backend="eager")
        return model

    return wrapped(compile_block)


@setup("a compiled mixer", "`block.mixer = torch.compile(block.mixer)`, with the gradients of `attribution`")
def compiled_mixer() -> float:
    from unilinattn import explain

    def compile_mixer(model: nn.Module) -> nn.Module:
        block = model.backbone.layers[0]
        block.mixer = torch.compile(block.mixer, backend="eager")
        result, plain = (
            explain(m, HOSTS["Mamba"].inputs(), method="attribution") for m in (model, HOSTS["Mamba"].model())
        )
        assert torch.allclose(result.scores, plain.scores, rtol=1e-4, atol=1e-6)
        return model

    return wrapped(compile_mixer, ("Mamba",))


@setup("DataParallel", "`nn.DataParallel(model)`")
def data_parallel() -> float:
    return wrapped(nn.DataParallel)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{os.path.join(folder, 'store')}"
        torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


@setup("DistributedDataParallel", "`DistributedDataParallel(model)` in one process")
def distributed_data_parallel() -> float:
    with process_group():
        return wrapped(nn.parallel.DistributedDataParallel)


@setup("FSDP", "`fully_shard` on every block, then on the model, in one process", refused=ModelStateError)
def fully_sharded() -> float:
    from torch.distributed.fsdp import fully_shard

    with process_group():
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        ids, model = HOSTS["Llama"].inputs(), HOSTS["Llama"].model()
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(ids)
        trace(model, ids)
    return 0.0


@setup("nn.Sequential", "`nn.Sequential(model)`, given the ids")
def sequential() -> float:
    return wrapped(nn.Sequential)


@setup("nn.Sequential, by name", "`nn.Sequential(model)`, given `input_ids` in a mapping", refused=InputError)
def sequential_by_name() -> float:
    model, ids = nn.Sequential(HOSTS["Llama"].model()), HOSTS["Llama"].inputs()
    return works(model, {"input_ids": ids}, lambda: model(ids))


@setup("a wrapper with `*args, **kwargs`", "a module whose forward passes on `*args, **kwargs`, given the ids")
def passes_on() -> float:
    return wrapped(PassesOn)


@setup(
    "a wrapper with `*args, **kwargs`, by name", "the same, given ids and a mask of padding on the right in a mapping"
)
def passes_on_names() -> float:
    def one(host: Host) -> float:
        ids, mask = host.inputs(), torch.ones_like(host.inputs())
        mask[1, 9:] = 0
        inputs, model = {"input_ids": ids, "attention_mask": mask}, PassesOn(host.model())
        return works(model, inputs, lambda: model(**inputs), like=(host.model(), inputs), real=mask.bool())

    return each(one)


@setup("a wrapper with `*args`", "a module whose forward passes on only `*args`, given the ids")
def passes_positions() -> float:
    return wrapped(PassesPositions)


@setup("a wrapper with `*args`, by name", "the same, given ids and a mask in a mapping", refused=InputError)
def positions_by_name() -> float:
    host = HOSTS["Mamba"]
    ids, model = host.inputs(), PassesPositions(host.model())
    return works(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, lambda: model(ids))


class Logits(PassesOn):
    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids, use_cache=False).logits


@setup("TorchScript", "`torch.jit.trace(model, ids)`", refused=ModelStateError)
def torchscript() -> float:
    host = HOSTS["Mamba"]
    ids = host.inputs()
    scripted = torch.jit.trace(Logits(host.model()), ids, check_trace=False)
    return works(scripted, ids, lambda: scripted(ids))


@setup("no module", 'the name of a checkpoint: `trace("gpt2", ids)`', refused=InputError)
def no_module() -> float:
    trace("gpt2", HOSTS["Llama"].inputs())
    return 0.0


@setup("a pipeline", "`trace(transformers.pipeline(...), ids)`", refused=InputError)
def pipeline() -> float:
    import transformers

    from tests.setups.calls import tokenizer

    host = HOSTS["Llama"]
    trace(transformers.TextGenerationPipeline(host.model(), tokenizer()), host.inputs())
    return 0.0


@setup(
    "accelerate device_map",
    "`dispatch_model(model, device_map, force_hooks=True)`, one block per device",
    needs=("accelerate",),
)
def device_map() -> float:
    from accelerate import dispatch_model

    def dispatch(model: nn.Module) -> nn.Module:
        places = {name: "cpu" for name, module in model.named_modules() if name and not list(module.children())}
        places |= {name: "cpu" for name, _ in model.named_parameters()}
        return dispatch_model(model, places, main_device="cpu", force_hooks=True)

    return wrapped(dispatch)


@setup("accelerate prepare", "`Accelerator(cpu=True).prepare(model)`", needs=("accelerate",))
def prepared() -> float:
    from accelerate import Accelerator

    return wrapped(Accelerator(cpu=True).prepare)


@setup("accelerate cpu_offload", "`cpu_offload(model, torch.device('cpu'))`", needs=("accelerate",))
def cpu_offload() -> float:
    from accelerate import cpu_offload

    return wrapped(lambda model: cpu_offload(model, torch.device("cpu")))


@setup(
    "accelerate cpu_offload, taken back",
    "the same, then `remove_hook_from_module(model, recurse=True)`",
    needs=("accelerate",),
)
def offload_taken_back() -> float:
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    return wrapped(lambda model: remove_hook_from_module(cpu_offload(model, torch.device("cpu")), recurse=True))


@setup("accelerate disk_offload", "`disk_offload(model, folder)`", needs=("accelerate",))
def disk_offload() -> float:
    from accelerate import disk_offload

    with tempfile.TemporaryDirectory() as folder:
        folders = (str(Path(folder, str(number))) for number in count())
        return wrapped(lambda model: disk_offload(model, next(folders), torch.device("cpu")))


@setup(
    "accelerate device_map with parts on the disk",
    "`dispatch_model(model, device_map, offload_dir=folder)`, every other module in files",
    needs=("accelerate",),
)
def parts_on_disk() -> float:
    from accelerate import dispatch_model

    def dispatch(model: nn.Module) -> nn.Module:
        children = [name for name, module in model.named_modules() if name and not list(module.children())]
        places = {name: "disk" if number % 2 else "cpu" for number, name in enumerate(children)}
        places |= {name: "cpu" for name, _ in model.named_parameters() if name.rpartition(".")[0] not in places}
        return dispatch_model(model, places, main_device="cpu", offload_dir=next(folders), force_hooks=True)

    with tempfile.TemporaryDirectory() as folder:
        folders = (str(Path(folder, str(number))) for number in count())
        return wrapped(dispatch)


@setup("weights never loaded", "a model built under `torch.device('meta')`", refused=ModelStateError)
def never_loaded() -> float:
    with torch.device("meta"):
        model = HOSTS["Llama"].build()
    trace(model, HOSTS["Llama"].inputs())
    return 0.0
