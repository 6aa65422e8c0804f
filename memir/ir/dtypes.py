"""The element types of tensors and their sizes in bytes; torch's names beside them."""

from __future__ import annotations

from types import MappingProxyType

# name -> (bytes an element takes, torch's name); c10/core/ScalarType.h. f4e2m1x2 packs two values into one byte.
_TABLE = {
    "bf16": (2, "bfloat16"),
    "f16": (2, "float16"),
    "f32": (4, "float32"),
    "f64": (8, "float64"),
    "i8": (1, "int8"),
    "i16": (2, "int16"),
    "i32": (4, "int32"),
    "i64": (8, "int64"),
    "u8": (1, "uint8"),
    "u16": (2, "uint16"),
    "u32": (4, "uint32"),
    "u64": (8, "uint64"),
    "bool": (1, "bool"),
    "c32": (4, "complex32"),
    "c64": (8, "complex64"),
    "c128": (16, "complex128"),
    "f8e4m3": (1, "float8_e4m3fn"),
    "f8e5m2": (1, "float8_e5m2"),
    "f8e4m3fnuz": (1, "float8_e4m3fnuz"),
    "f8e5m2fnuz": (1, "float8_e5m2fnuz"),
    "f8e8m0": (1, "float8_e8m0fnu"),
    "f4e2m1x2": (1, "float4_e2m1fn_x2"),
    "qi8": (1, "qint8"),
    "qu8": (1, "quint8"),
    "qi32": (4, "qint32"),
}

ITEMSIZE = MappingProxyType({name: nbytes for name, (nbytes, _) in _TABLE.items()})  # bytes per element
FROM_TORCH = MappingProxyType({torch_name: name for name, (_, torch_name) in _TABLE.items()})  # "bfloat16" -> "bf16"
TO_TORCH = MappingProxyType({name: torch_name for name, (_, torch_name) in _TABLE.items()})
