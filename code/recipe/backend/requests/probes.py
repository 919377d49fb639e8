"""The inputs that every model answers at the end of its training and at each start of a server.

They are the same for all models and contain nothing of a user's data.
"""

from __future__ import annotations

import io

TEXTS = (
    "The committee approved the proposal after a short debate, although two members had asked "
    "for more time to read the annex.",
    "who was anna",
    "In 2024 the index rose by 3.75 % to 18,204.60 points; orders of $1,299 or more ship free.",
    "Das Schlo\u00df \u00fcber dem Flu\u00df geh\u00f6rt seit 1815 der Stadt, nicht dem Grafen.",
    "L'\u00e9t\u00e9 dernier, nous avons mang\u00e9 des cr\u00eapes pr\u00e8s de l'\u00e9glise.",
    "\u041c\u043e\u0441\u043a\u0432\u0430 \u2014 \u0441\u0442\u043e\u043b\u0438\u0446\u0430 "
    "\u0420\u043e\u0441\u0441\u0438\u0438.",
    "\u6211\u5728\u5317\u4eac\u5927\u5b66\u5b66\u4e60\u8ba1\u7b97\u673a\u79d1\u5b66\u3002",
    "\u6771\u4eac\u306f\u4eca\u65e5\u3082\u96e8\u3067\u3059\u3002",
    "\u0630\u0647\u0628\u062a \u0625\u0644\u0649 \u0627\u0644\u0645\u0643\u062a\u0628\u0629",
    "\u092f\u0939 \u090f\u0915 \u0935\u093e\u0915\u094d\u092f \u0939\u0948",
    "I loved it \U0001f600\U0001f44d  -- would\tbuy\tagain!!! (10/10)",
    'def area(r):\n    return 3.14159 * r ** 2  # "pi"\n\n\nprint(area(12))',
    "https://example.org/a?b=1&c=%20#d mail@example.org +49 30 1234567",
    "NOT ALL CAPITAL LETTERS ARE SHOUTED, mcdonald's o'clock e-mail naive na\u00efve",
    "a",
    # Equal lengths share calls of models that cannot be padded.
    "who was anna",
)
"""Texts of several languages and lengths, with digits, symbols and newlines."""
PROMPTS = (TEXTS[0], "List three colours:\n1.")
NEW_TOKENS = 8
"""Tokens that continue a prompt."""


def draw_images() -> tuple[bytes, bytes]:
    """Return two images as PNG: a gradient in three colours, and a wider one with rings."""
    import numpy as np
    from PIL import Image

    files = []
    for width, height, period in ((64, 64, 0), (96, 48, 9)):
        y, x = np.mgrid[0:height, 0:width]
        rings = ((x - width // 3) ** 2 + (y - height // 2) ** 2) // max(period, 1) % 2 * 90
        channels = (x * 255 // width, y * 255 // height, (x + y) % 256)
        pixels = np.stack(channels, axis=-1) // (2 if period else 1)
        out = io.BytesIO()
        shown = (pixels + (rings[..., None] if period else 0)).astype(np.uint8)
        Image.fromarray(shown).save(out, format="PNG")
        files.append(out.getvalue())
    return files[0], files[1]
