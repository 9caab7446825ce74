"""``"shape": "auto"``: the tree's size follows measured cost and acceptance.

``ladder``      the sizes to choose from, off included
``acceptance``  expected accept length of every rung, from what the running one accepts
``costs``       milliseconds of a step of every rung, measured at start-up, then online
``policy``      tokens per second decide; hysteresis and probes
``scheduler``   asks the policy once a step and tells it what came of it
``profile``     the start-up measurement, in the worker
"""
