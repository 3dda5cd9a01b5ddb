"""The ops by which a graph that MAX compiles calls library functions: Mojo source, written from the signatures.

An op is thin: it hands its operands over as words. Nothing of a kernel is in the package that holds them.
"""

from __future__ import annotations

import functools

from max.dtype import DType

from torch_max_backend.mojo_ops import KERNELS_PATH
from torch_max_backend.mojo_ops.signatures import Signature, Tensor, declared, load_all

_HEAD = """import extensibility
from extensibility import InputTensor, InputVariadicTensors, OutputTensor
from max.gpu.host import DeviceContext

from .library import Call
"""

_OP = """

@extensibility.register("{name}")
struct {struct}:
    @staticmethod
    def execute[
        target: StaticString, {dtypes}function: StaticString
    ](
        {arguments},
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        {appended}
        call.run[function](ctx)
"""


def package() -> dict[str, str]:
    """The files of a Mojo package with the ops."""
    library = (KERNELS_PATH / "common" / "library.mojo").read_text()
    return {"__init__.mojo": "", "library.mojo": library, "ops.mojo": registration_source()}


@functools.cache
def registration_source() -> str:
    """Mojo source that registers an op for each signature.

    Parameters of an op are the dtypes that the signature names, and ``function``, the symbol of the library's function.
    Operands are the call's numbers, where it has any (int64, on the host), then the signature's.
    """
    load_all()
    families = [family for _, family in sorted(declared.items())]
    return _HEAD + "".join(_op(each) for family in families for each in family.signatures if each.is_op)


def _op(entry: Signature) -> str:
    tensors = (*entry.results, *entry.operands)
    names = dict.fromkeys(tensor.dtype for tensor in tensors if isinstance(tensor.dtype, str))
    arguments = [f"{tensor.name}: Output{_kind(tensor)}" for tensor in entry.results]
    appended = []
    if entry.takes_numbers:
        arguments.append(f"numbers: Input{_kind(Tensor('numbers', DType.int64, 1))}")
        appended.append(f"call.append_numbers(numbers, {len(entry.numbers)}, listed={bool(entry.listed)})")
    arguments += [f"{tensor.name}: Input{_kind(tensor)}" for tensor in entry.operands]
    if entry.after:
        # MAX knows by operands alone that what makes them comes first.
        arguments.append(f"after: InputVariadic{_kind(entry.operands[0]).replace('Tensor', 'Tensors', 1)}")
    appended += [f"call.append({tensor.name})" for tensor in tensors]
    return _OP.format(
        name=entry.name,
        struct="".join(word.capitalize() for word in entry.name.split("_")),
        dtypes="".join(f"{name}: DType, " for name in names),
        arguments=",\n        ".join(arguments),
        appended="\n        ".join(appended),
    )


def _kind(tensor: Tensor) -> str:
    dtype = tensor.dtype if isinstance(tensor.dtype, str) else f"DType.{tensor.dtype.name}"
    return f"Tensor[dtype={dtype}, rank={tensor.rank}, ...]"
