"""Write a one-dimensional .npy file piece by piece, without knowing its length beforehand."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt


class NpyWriter:
    """Appends arrays to a .npy file; its header, which numpy pads for growth, gets the true length at the end."""

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self._file = path.open("wb")
        self._dtype = np.dtype(dtype)
        self.length = 0
        self._write_header()
        self._data_start = self._file.tell()

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, values: npt.NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(values, self._dtype).data)
        self.length += len(values)

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()
        assert self._file.tell() == self._data_start, "the header of a .npy file must not grow"
        self._file.close()

    def __enter__(self) -> NpyWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
