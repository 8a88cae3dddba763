# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
