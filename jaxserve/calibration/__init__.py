"""INT8 weights from calibration: SmoothQuant's scales and GPTQ's error compensation."""
