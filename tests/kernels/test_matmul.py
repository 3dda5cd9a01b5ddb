"""Batched matrix products: random sizes, strides, addresses and dtypes against float64."""

from __future__ import annotations

import math

import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from benchmarks.kernels.library import words_of
from benchmarks.kernels.matmul import DTYPES, Products, check, geometry_of
from torch_max_backend.mojo_ops.matmul import FAMILY, STRIDED, MatmulGeometry, MatrixStrides, matmul
from torch_max_backend.runtime.engine import session

CPU = torch.device("cpu")


def test_random_products_are_near_float64() -> None:
    assert not check(600, 0, CPU, list(DTYPES.values()))


def test_whole_numbers_are_exact() -> None:
    products = Products(CPU, [torch.bfloat16])
    a, b = (torch.randint(-2, 3, shape).bfloat16() for shape in ((7, 65, 600), (7, 600, 33)))
    c = torch.full((7, 65, 33), math.nan, dtype=torch.bfloat16)
    products.bind((c, a, b))()
    assert torch.equal(c, (a.double() @ b.double()).bfloat16())


def test_nothing_is_written_beside_the_result() -> None:
    products = Products(CPU, [torch.float32])
    memory = torch.full((5, 40, 50), 7.0)
    c = memory[1:4, 2:35, 3:38]
    products.bind((c, torch.ones(3, 33, 20), torch.ones(3, 20, 35)))()
    assert (c == 20).all()
    c.fill_(7)
    assert (memory == 7).all()


def test_a_geometry_that_does_not_fit_is_refused() -> None:
    products = Products(CPU, [torch.float32])
    c = torch.empty(2, 3, 4)
    numbers = geometry_of(c, torch.empty(2, 3, 5), torch.empty(2, 5, 4)).numbers()
    function = products.functions[torch.float32]
    for name, message in (("k", "no extent may be negative"), ("a_row", "A's .* no stride may be negative")):
        bad = list(numbers)
        bad[list(STRIDED.numbers).index(name)] = -1
        with pytest.raises(RuntimeError, match=message):
            products.launcher.bind(function, words_of(STRIDED, c, c, c, numbers=bad))()


def test_contiguous_batches_that_do_not_fit_are_refused() -> None:
    products = Products(CPU, [torch.float32])
    c, a, b = torch.empty(2, 3, 4), torch.ones(2, 3, 5), torch.ones(2, 4, 5)
    function, signature = products.functions[torch.float32], FAMILY["matmul"]
    products.launcher.bind(function, words_of(signature, c, a, b, numbers=[0, 0, 0, 1]))()
    assert (c == 5).all()
    for bad_a, bad_b, message in (
        (a[:1], b, "must have one batch"),
        (a, b.mT.contiguous(), "must fit together"),
        (a, torch.ones(2, 4, 6), "A has 5 columns, B has 6 rows"),
    ):
        with pytest.raises(RuntimeError, match=message):
            products.launcher.bind(function, words_of(signature, c, bad_a, bad_b, numbers=[0, 0, 0, 1]))()


def test_a_geometry_with_a_negative_stride_is_refused() -> None:
    with pytest.raises(ValueError, match="no stride may be negative"):
        MatmulGeometry(
            1,
            1,
            1,
            (1, 1, 1),
            MatrixStrides((0, 0, 0), -1, 1),
            MatrixStrides((0, 0, 0), 1, 1),
            MatrixStrides((0, 0, 0), 1, 1),
        )


@pytest.mark.parametrize(
    ("shapes", "dtypes", "message"),
    [
        (((2, 3, 4), (2, 5, 6)), ("float32", "float32"), "K is 5 in b: must be a's, 4"),
        (((2, 3, 4), (3, 4, 6)), ("float32", "float32"), "batch is 3 in b: must be a's, 2"),
        (((3, 4), (2, 4, 6)), ("float32", "float32"), "a has rank 2: must be 3"),
        (((2, 3, 4), (2, 4, 6)), ("float32", "bfloat16"), "b has dtype bfloat16: must be a's, float32"),
        (((2, 3, 4), (2, 4, 6)), ("int32", "int32"), "a has dtype int32"),
    ],
)
def test_bad_operands_are_named(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], message: str) -> None:
    types = [TensorType(DType[dtype], shape, DeviceRef.CPU()) for shape, dtype in zip(shapes, dtypes, strict=True)]
    with Graph("refused", input_types=types, kernel_library=session.kernel_library()) as graph:
        with pytest.raises(ValueError, match=message):
            matmul(*(value.tensor for value in graph.inputs))
        graph.output()
