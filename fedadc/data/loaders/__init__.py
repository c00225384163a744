"""One file per kind of source: built-in data sets, arrays, CSV tables, .npz files, folders of images."""
