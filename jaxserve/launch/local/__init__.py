"""Starts a deployment as several processes on this host: `jaxserve launch --target local`."""
