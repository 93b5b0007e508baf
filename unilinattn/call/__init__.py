"""The call of a host's module: its arguments, its weights, and transformers' attention interface inside it."""

from unilinattn.call.call import (
    CACHES,
    MASKING,
    Affine,
    Call,
    Captured,
    Host,
    host_function,
    is_cache,
    masks_by_function,
    package_version,
    padded_left,
    projection_leak,
    refusing,
    unmasked_leak,
)

__all__ = [
    "CACHES",
    "MASKING",
    "Affine",
    "Call",
    "Captured",
    "Host",
    "host_function",
    "is_cache",
    "masks_by_function",
    "package_version",
    "padded_left",
    "projection_leak",
    "refusing",
    "unmasked_leak",
]
