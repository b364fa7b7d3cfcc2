"""Names for the numpy arrays that cross the native boundary. All are C-contiguous."""

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]
Keys = NDArray[np.uint8]  # [n, 32], page keys
ObjectIds = NDArray[np.uint8]  # [n, 36], key ‖ pool u16 ‖ rank u16
