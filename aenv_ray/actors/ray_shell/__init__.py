"""Ray's own API, its versions and private corners: nothing else of `actors` knows them."""
