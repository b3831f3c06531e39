"""The cells that Step-3 (arXiv 2507.19427) prints, for comparison in `tables.py`. Data copied from
the paper; nothing is computed here."""

MODELS = {
    "DSv3": "deepseek-v3",
    "Kimi K2": "kimi-k2",
    "Qwen3 MoE": "qwen3-235b-a22b",
    "Qwen3 32B": "qwen3-32b",
    "Llama 4 M": "llama-4-maverick",
    "MM M1": "minimax-m1",
    "ERNIE 4.5": "ernie-4.5",
    "Pangu Pro MoE": "pangu-pro-moe",
    "Step-3": "step3",
}
"""The paper's names, in its order, and the project's."""

HARDWARE = {"H800": "h800", "H20": "h20", "A800": "a800", "910B": "910b"}

# Cache bytes, attention FLOPs, linear FLOPs, FFN FLOPs of a token.
TABLE_2 = {
    "DSv3": "2.88e+08 1.47e+11 2.28e+10 4.84e+10",
    "Kimi K2": "2.88e+08 7.37e+10 1.23e+10 4.84e+10",
    "Qwen3 MoE": "7.89e+08 2.52e+10 1.34e+10 2.84e+10",
    "Qwen3 32B": "1.07e+09 1.72e+10 1.21e+10 5.03e+10",
    "Llama 4 M": "1.01e+09 8.05e+09 6.04e+09 2.42e+10",
    "MM M1": "9.23e+08 3.42e+09 3.75e+10 5.44e+10",
    "ERNIE 4.5": "9.06e+08 1.45e+10 1.63e+10 7.61e+10",
    "Pangu Pro MoE": "8.05e+08 8.05e+09 6.04e+09 2.38e+10",
    "Step-3": "2.56e+08 3.27e+10 2.07e+10 5.33e+10",
}

TABLE_3 = {
    "DSv3": "1.15e+09 5.89e+11 2.28e+10 4.84e+10",
    "Kimi K2": "1.15e+09 2.95e+11 1.23e+10 4.84e+10",
    "Qwen3 MoE": "3.15e+09 1.01e+11 1.34e+10 2.84e+10",
    "Qwen3 32B": "4.29e+09 6.87e+10 1.21e+10 5.03e+10",
    "Llama 4 M": "2.21e+09 1.41e+10 6.04e+09 2.42e+10",
    "MM M1": "1.93e+09 1.15e+10 3.75e+10 5.44e+10",
    "ERNIE 4.5": "3.62e+09 5.80e+10 1.63e+10 7.61e+10",
    "Pangu Pro MoE": "3.22e+09 3.22e+10 6.04e+09 2.38e+10",
    "Step-3": "1.02e+09 1.31e+11 2.07e+10 5.33e+10",
}

# USD an hour, BF16 FLOP/s, FP8 FLOP/s, bytes/s, roofline.
TABLE_4 = {
    "H800": "2 9.89e+14 1.98e+15 3.35e+12 591",
    "H20": "0.8 1.48e+14 2.96e+14 4.00e+12 74",
    "A800": "0.75 3.12e+14 N/A 2.00e+12 156",
    "910B": "0.67 2.80e+14 N/A 1.60e+12 175",
}

# USD a FLOP, USD a byte.
TABLE_5 = {
    "H800": "2.80e-19 1.66e-16",
    "H20": "7.51e-19 5.56e-17",
    "A800": "6.68e-19 1.04e-16",
    "910B": "6.65e-19 1.16e-16",
}

# USD a million tokens: attention at 8K, attention at 32K, FFN, on each hardware.
TABLE_6 = {
    "DSv3": "0.054 0.128 0.114 0.113 0.197 0.460 0.409 0.407 0.014 0.036 0.032 0.032",
    "Kimi K2": "0.051 0.065 0.057 0.057 0.194 0.231 0.205 0.204 0.014 0.036 0.032 0.032",
    "Qwen3 MoE": "0.135 0.054 0.091 0.101 0.527 0.185 0.338 0.376 0.008 0.021 0.019 0.019",
    "Qwen3 32B": "0.181 0.069 0.120 0.133 0.716 0.248 0.455 0.508 0.014 0.038 0.034 0.033",
    "Llama 4 M": "0.169 0.060 0.109 0.121 0.369 0.128 0.235 0.262 0.007 0.018 0.016 0.016",
    "MM M1": "0.164 0.079 0.121 0.132 0.330 0.135 0.226 0.249 0.015 0.041 0.036 0.036",
    "ERNIE 4.5": "0.155 0.063 0.105 0.116 0.606 0.214 0.388 0.432 0.021 0.057 0.051 0.051",
    "Pangu Pro MoE": "0.135 0.049 0.088 0.098 0.536 0.183 0.340 0.379 0.007 0.018 0.016 0.016",
    "Step-3": "0.048 0.040 0.040 0.043 0.176 0.114 0.120 0.133 0.015 0.040 0.036 0.035",
}

# Minimum sparsity of the experts, with a width of 7168 and 61 layers.
TABLE_7 = {"H800": "0.058", "H20": "0.007", "A800": "0.031", "910B": "0.034"}

# Activated parameters in billions, as the caption of table 6 has them (figure 1's axis).
ACTIVATED = {
    "DSv3": "37",
    "Qwen3 MoE": "22",
    "Qwen3 32B": "32",
    "MM M1": "46",
    "ERNIE 4.5": "47",
    "Pangu Pro MoE": "16.5",
    "Step-3": "38",
}

# USD a million tokens of the best deployment at 8K and 32K, from the text beside figure 2.
FIGURE_2 = {"DSv3": "0.068 0.211", "Qwen3 MoE": "0.062 0.193", "Step-3": "0.055 0.129"}

# FLOPs a byte of cache (§5.1).
FIGURE_5 = {"DSv3": "512", "Qwen3 MoE": "32", "Step-3": "128"}
