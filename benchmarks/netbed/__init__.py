"""A network of sites on one machine, throttled as a TOML file says, measured before anything is reported from it."""
