"""Products of rows with weights on the CPU, a module for each form of weights and instruction: bf16 by AVX512-BF16
(bf16.py), by AMX (tiles.py) or in fp32 (wide.py, for fp32 weights too); fp32 weights that stay as they are (in_rows.py);
4 bits (nibbles.py, nibble_tiles.py); int8. Most weights are stored in panels of 32 outputs, which bf16.py packs."""
