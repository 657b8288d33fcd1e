"""The few calls of the CUDA driver that PyTorch does not offer: registered memory, plain copies, waits on a word.

Loaded when first used (`libcuda.so.1`); every call releases the GIL and raises `DriverError` for what goes wrong.
"""

import ctypes
import functools

from fs_comm.errors import CommError

_Pointer, _Size, _Word = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint32
_WAIT_GREATER_OR_EQUAL, _WAIT_EQUAL = 0, 1
_NON_BLOCKING_STREAM = 1
_REGISTER_PORTABLE, _REGISTER_DEVICEMAP = 1, 2

_ARGUMENTS = {
    "cuCtxGetCurrent": (ctypes.POINTER(ctypes.c_void_p),),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuStreamCreate": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint),
    "cuMemHostRegister_v2": (ctypes.c_void_p, _Size, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(_Pointer), ctypes.c_void_p, ctypes.c_uint),
    "cuMemcpyDtoHAsync_v2": (ctypes.c_void_p, _Pointer, _Size, ctypes.c_void_p),
    "cuMemcpyHtoDAsync_v2": (_Pointer, ctypes.c_void_p, _Size, ctypes.c_void_p),
    "cuStreamWaitValue32_v2": (ctypes.c_void_p, _Pointer, _Word, ctypes.c_uint),
    "cuStreamWriteValue32_v2": (ctypes.c_void_p, _Pointer, _Word, ctypes.c_uint),
}


class DriverError(CommError):
    """A call of the CUDA driver failed."""


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"CUDA tensors need NVIDIA's driver: {error}") from error
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name, None)
        if function is not None:  # an older driver: told of when called
            function.argtypes, function.restype = arguments, ctypes.c_int
    return library


@functools.cache
def _function(name: str) -> "ctypes._NamedFuncPointer":  # pyright: ignore[reportPrivateUsage]
    function = getattr(_library(), name, None)
    if function is None:
        raise DriverError(f"the CUDA driver has no {name}: it is older than CUDA 12")
    return function


def _call(name: str, *arguments: object) -> None:
    code = _function(name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{name} failed with {code}: {(text.value or b'unknown').decode()}")


def current_context() -> int:
    """The calling thread's context, for `set_context` in another thread."""
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    return context.value or 0


def set_context(context: int) -> None:
    _call("cuCtxSetCurrent", context)


def new_stream() -> int:
    """A stream of its own. Streams of torch's pool come round again, to wait behind ours."""
    stream = ctypes.c_void_p()
    _call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING_STREAM)
    assert stream.value is not None
    return stream.value


def register(address: int, num_bytes: int) -> int:
    """Pins host memory, for all contexts; returns its address as the device sees it."""
    _call("cuMemHostRegister_v2", address, num_bytes, _REGISTER_PORTABLE | _REGISTER_DEVICEMAP)
    device = _Pointer()
    _call("cuMemHostGetDevicePointer_v2", ctypes.byref(device), address, 0)
    return device.value


def unregister(address: int) -> None:
    _call("cuMemHostUnregister", address)


def to_host(address: int, device: int, num_bytes: int, stream: int) -> None:
    _call("cuMemcpyDtoHAsync_v2", address, device, num_bytes, stream)


def to_device(device: int, address: int, num_bytes: int, stream: int) -> None:
    _call("cuMemcpyHtoDAsync_v2", device, address, num_bytes, stream)


def wait_until_at_least(stream: int, device: int, count: int) -> None:
    """The stream waits until the word has come as far as `count`, which may wrap around."""
    _call("cuStreamWaitValue32_v2", stream, device, count & 0xFFFFFFFF, _WAIT_GREATER_OR_EQUAL)


def wait_until_equal(stream: int, device: int, value: int) -> None:
    _call("cuStreamWaitValue32_v2", stream, device, value & 0xFFFFFFFF, _WAIT_EQUAL)


def write(stream: int, device: int, value: int) -> None:
    """After what the stream did before, which is visible to whoever sees the value."""
    _call("cuStreamWriteValue32_v2", stream, device, value & 0xFFFFFFFF, 0)
