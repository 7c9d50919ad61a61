"""Write the images that the `digits` data source ships: `python tools/make_digits.py` (needs scikit-learn).

Takes the Optical Recognition of Handwritten Digits data set (E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository, https://doi.org/10.24432/C50P49, CC BY 4.0) as scikit-learn's `load_digits` holds it: 1,797 images of 8x8
pixels with values 0..16. The order is kept. The archive's time stamps are fixed, so the same zlib gives the same bytes.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]

TARGET = Path(__file__).parents[1] / "src" / "hetmesh" / "data" / "digits.npz"


def main() -> None:
    """Write TARGET and print its size."""
    digits = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    if images.shape != (1797, 8, 8) or not np.array_equal(images, digits.images) or images.max() != 16:
        raise ValueError(f"not the data set expected: shape {images.shape}, largest value {images.max()}")
    np.savez_compressed(TARGET, images=images, labels=labels)
    print(f"{TARGET}: {len(images)} images, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
