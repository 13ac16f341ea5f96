#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/node.h>

#include <gradus/base/error.h>
#include <gradus/plane/grad/grad_plane.h>

namespace gradus::plane::grad {

/// Opens a view for the plane itself.
class Access {
 public:
  static torch::autograd::Node& node(const NodeView& view) {
    GRADUS_CHECK("grad_plane", view.defined(), "a defined node is required; got an undefined one");
    return *view.node_;
  }
  static torch::autograd::Edge edge(const EdgeView& view) {
    node(view.node);
    return {view.node.node_, static_cast<std::uint32_t>(view.input)};
  }
};

}  // namespace gradus::plane::grad
