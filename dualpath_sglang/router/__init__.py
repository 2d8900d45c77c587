"""The front door of prefill and decode servers: ``dualpath router``.

It applies :mod:`dualpath_sglang.scheduling` to what engines and agents report, and knows SGLang by
its HTTP interface alone. From the bottom up: what is configured (``options``), the engines and
what is known of them (``engines``, ``loads``, ``nodes``, ``shared``), a request as it comes in
(``requests``, ``tokens``, ``sessions``), its place (``dispatch``, ``trace``), its way to two
engines and back (``upstream``, ``attempt``, ``forward``), and the server around it (``app``,
``admin``, ``process``). Each needs the package's extra ``router``.
"""
