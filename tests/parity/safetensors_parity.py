"""Reads and writes safetensors files in Python for the parity test in C++.

    safetensors_parity.py write FILE   writes the reference tensors with safetensors.torch
    safetensors_parity.py check FILE   exits 0 if FILE holds exactly the reference tensors, bit for bit

safetensors_parity_test.cpp builds the same reference tensors: element i of a tensor has the bytes of the 64-bit number
(i + 1) * 0x9E3779B97F4A7C15 mod 2^64, as many as its dtype takes, the low ones first; a bool takes the lowest bit.
"""

import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8_e4m3": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2,
    "c64": torch.complex64,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u64": torch.uint64,
    "u32": torch.uint32,
    "u16": torch.uint16,
    "u8": torch.uint8,
    "bool": torch.bool,
}
SHAPES = {"scalar": (), "empty": (0,), "empty3": (2, 0, 3), "vector": (5,), "cube": (2, 3, 4)}
METADATA = {"format": "pt", "note": 'quotes " and é\n'}


def reference(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    data = bytearray()
    for i in range(count):
        number = ((i + 1) * 0x9E3779B97F4A7C15) % 2**64
        data += bytes([number & 1]) if dtype == torch.bool else number.to_bytes(8, "little")[: dtype.itemsize]
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def references() -> dict[str, torch.Tensor]:
    return {f"{d}.{s}": reference(dtype, shape) for d, dtype in DTYPES.items() for s, shape in SHAPES.items()}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def check(path: str) -> list[str]:
    expected, got = references(), load_file(path)
    faults = [f"missing {name}" for name in expected.keys() - got.keys()]
    faults += [f"unexpected {name}" for name in got.keys() - expected.keys()]
    for name in expected.keys() & got.keys():
        a, b = expected[name], got[name]
        if a.dtype != b.dtype or a.shape != b.shape or bits(a) != bits(b):
            faults.append(f"{name}: expected {a.dtype} {tuple(a.shape)} {a}, got {b.dtype} {tuple(b.shape)} {b}")
    with safe_open(path, framework="pt") as file:
        if file.metadata() != METADATA:
            faults.append(f"metadata: expected {METADATA}, got {file.metadata()}")
    return faults


def main() -> int:
    command, path = sys.argv[1:]
    if command == "write":
        save_file(references(), path, metadata=METADATA)
        return 0
    faults = check(path)
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
