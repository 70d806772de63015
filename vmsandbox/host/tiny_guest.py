"""Owns the smallest guest that proves a kernel runs: an initramfs made in memory. Pure; knows no
QEMU.

Its /init is a hand-made static x86-64 program: it prints a marker through the console, waits until
the serial line has sent it, and asks the kernel to restart, which ends a QEMU started with
``-no-reboot``. That the marker appears proves the boot up to user mode and a working serial line.
"""

import struct
from collections.abc import Iterable

MARKER = b"vmsandbox: accelerator works\n"

_LOAD_ADDRESS = 0x400000
_HEADERS_BYTES = 64 + 56  # ELF header and one program header, see elf(5)

# System calls of x86-64 and their arguments: asm/unistd_64.h, linux/reboot.h, asm-generic/ioctls.h.
_WRITE, _IOCTL, _REBOOT = 1, 16, 169
_TCSBRK = 0x5409  # with argument 1: tcdrain(3)
_REBOOT_MAGIC, _REBOOT_MAGIC_2, _RESTART = 0xFEE1DEAD, 0x28121969, 0x01234567
_STDOUT = 1


def initramfs() -> bytes:
    """An uncompressed newc archive (kernel: Documentation/driver-api/early-userspace/
    buffer-format.rst) with /init and /dev/console, without which init has no output."""
    return archive(
        [
            entry("dev", 0o040755),
            entry("dev/console", 0o020600, device=(5, 1)),
            entry("init", 0o100755, data=program(MARKER)),
        ]
    )


def archive(entries: Iterable[bytes]) -> bytes:
    return b"".join([*entries, entry("TRAILER!!!", 0)])


def entry(name: str, mode: int, *, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    """One member: magic, 13 fields of 8 hexadecimal digits, name and data, each padded to 4."""
    inode, uid, gid, links, mtime, check = 0, 0, 0, 1, 0, 0
    raw_name = name.encode() + b"\0"
    fields = (inode, mode, uid, gid, links, mtime, len(data), 0, 0, *device, len(raw_name), check)
    header = b"070701" + b"".join(b"%08x" % field for field in fields)
    return _padded(header + raw_name) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def program(text: bytes) -> bytes:
    """A static ELF program that prints `text`, drains the line and restarts the machine."""
    calls = [
        _call(_IOCTL, _STDOUT, _TCSBRK, 1),
        _call(_REBOOT, _REBOOT_MAGIC, _REBOOT_MAGIC_2, _RESTART),
        b"\xeb\xfe",  # jmp to itself, should the kernel refuse
    ]
    address = _LOAD_ADDRESS + _HEADERS_BYTES  # the text comes first, then the code
    code = _call(_WRITE, _STDOUT, address, len(text)) + b"".join(calls)
    return executable(text, code)


def executable(data: bytes, code: bytes) -> bytes:
    """An ELF file of one segment, readable and executable: headers, `data`, then `code`."""
    size = _HEADERS_BYTES + len(data) + len(code)
    ident = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)  # 64 bit, little endian, version 1
    start = _LOAD_ADDRESS + _HEADERS_BYTES + len(data)
    # type EXEC, machine x86-64, version; entry, program headers at 64, no sections; flags,
    # sizes of the headers, one program header, no section headers
    header = ident + struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, start, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    # PT_LOAD, R+X, offset 0, virtual and physical address, size in file and memory, alignment
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _LOAD_ADDRESS, _LOAD_ADDRESS, size, size, 0x1000)
    return header + segment + data + code


def _call(number: int, first: int, second: int, third: int) -> bytes:
    """mov eax, number; mov edi, first; mov esi, second; mov edx, third; syscall."""
    registers = zip(b"\xb8\xbf\xbe\xba", (number, first, second, third), strict=True)
    return b"".join(struct.pack("<BI", *pair) for pair in registers) + b"\x0f\x05"
