"""The network faces in processes of their own, beside the one that runs the engine.

A face's work (tokenising, detokenising, stop strings, templates, messages) then costs the engine's
step loop nothing but one message a step and process: xDeepServe's output short-circuit (§4.2).
`host.py` is the engine's side, `child.py` and `remote.py` the face's, `frames.py` is between them.
"""
