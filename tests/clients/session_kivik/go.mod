module notibus/tests/clients/kivik

go 1.19

require github.com/go-kivik/kivik/v4 v4.4.1
