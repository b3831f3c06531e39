"""INT8 and INT4 weights from calibration: SmoothQuant's scales, GPTQ's error compensation."""
