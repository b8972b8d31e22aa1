"""Communication overlap: chunked transfers under matrix products and attention; copy engines."""
