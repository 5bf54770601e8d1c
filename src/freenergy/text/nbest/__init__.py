"""Lists of candidates ranked by a residual model: files, weights, errors and their significance."""

from freenergy.text.nbest.combining import Combination as Combination
from freenergy.text.nbest.combining import Development as Development
from freenergy.text.nbest.combining import tune as tune
from freenergy.text.nbest.files import rank_file as rank_file
from freenergy.text.nbest.nbest import NBest as NBest
from freenergy.text.nbest.nbest import read_lists as read_lists
from freenergy.text.nbest.significance import Comparison as Comparison
from freenergy.text.nbest.significance import compare as compare
from freenergy.text.nbest.tables import Table as Table
from freenergy.text.nbest.tables import tables as tables
