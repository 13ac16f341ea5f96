#include <gradus/amp/autocast/internal/torch_lists.h>

namespace gradus::amp::internal {

using Names = std::vector<std::string>;

const Names& torch_cpu_lower_precision() {
  static const Names names{"aten::_addmm_activation",
                           "aten::_convolution.deprecated",
                           "aten::_native_multi_head_attention",
                           "aten::addbmm",
                           "aten::addmm",
                           "aten::baddbmm",
                           "aten::bmm",
                           "aten::conv1d",
                           "aten::conv2d",
                           "aten::conv3d",
                           "aten::conv_tbc",
                           "aten::conv_transpose1d",
                           "aten::conv_transpose2d",
                           "aten::conv_transpose3d",
                           "aten::linalg_vecdot",
                           "aten::linear",
                           "aten::matmul",
                           "aten::mkldnn_rnn_layer",
                           "aten::mm",
                           "aten::prelu",
                           "aten::scaled_dot_product_attention"};
  return names;
}

const Names& torch_cpu_fp32() {
  static const Names names{"aten::_grid_sampler_2d_cpu_fallback",
                           "aten::_lu_with_info",
                           "aten::adaptive_avg_pool3d",
                           "aten::adaptive_max_pool3d",
                           "aten::avg_pool3d",
                           "aten::binary_cross_entropy",
                           "aten::binary_cross_entropy_with_logits",
                           "aten::cdist",
                           "aten::cholesky",
                           "aten::cholesky_inverse",
                           "aten::cholesky_solve",
                           "aten::cosine_embedding_loss",
                           "aten::cross_entropy_loss",
                           "aten::ctc_loss",
                           "aten::fake_quantize_per_tensor_affine",
                           "aten::fft_fft",
                           "aten::fft_fft2",
                           "aten::fft_fftn",
                           "aten::fft_hfft",
                           "aten::fft_ifft",
                           "aten::fft_ifft2",
                           "aten::fft_ifftn",
                           "aten::fft_ihfft",
                           "aten::fft_irfft",
                           "aten::fft_irfft2",
                           "aten::fft_irfftn",
                           "aten::fft_rfft",
                           "aten::fft_rfft2",
                           "aten::fft_rfftn",
                           "aten::fractional_max_pool2d",
                           "aten::fractional_max_pool3d",
                           "aten::geqrf",
                           "aten::grid_sampler",
                           "aten::grid_sampler_2d",
                           "aten::grid_sampler_3d",
                           "aten::hinge_embedding_loss",
                           "aten::huber_loss",
                           "aten::inverse",
                           "aten::kl_div",
                           "aten::l1_loss",
                           "aten::linalg_cholesky",
                           "aten::linalg_cholesky_ex",
                           "aten::linalg_cond",
                           "aten::linalg_eig",
                           "aten::linalg_eigh",
                           "aten::linalg_eigvals",
                           "aten::linalg_eigvalsh",
                           "aten::linalg_householder_product",
                           "aten::linalg_inv",
                           "aten::linalg_inv_ex",
                           "aten::linalg_lstsq",
                           "aten::linalg_matrix_rank",
                           "aten::linalg_qr",
                           "aten::linalg_solve",
                           "aten::linalg_svd",
                           "aten::linalg_svdvals",
                           "aten::linalg_tensorinv",
                           "aten::linalg_tensorsolve",
                           "aten::lu_solve",
                           "aten::margin_ranking_loss",
                           "aten::max_pool3d",
                           "aten::max_unpool2d",
                           "aten::max_unpool3d",
                           "aten::mse_loss",
                           "aten::multi_margin_loss",
                           "aten::multilabel_margin_loss",
                           "aten::multilabel_margin_loss_forward",
                           "aten::nanquantile",
                           "aten::nll_loss",
                           "aten::nll_loss2d",
                           "aten::orgqr",
                           "aten::ormqr",
                           "aten::pinverse",
                           "aten::poisson_nll_loss",
                           "aten::polar",
                           "aten::prod",
                           "aten::qr",
                           "aten::quantile",
                           "aten::reflection_pad1d",
                           "aten::reflection_pad2d",
                           "aten::replication_pad1d",
                           "aten::replication_pad2d",
                           "aten::replication_pad3d",
                           "aten::smooth_l1_loss",
                           "aten::soft_margin_loss",
                           "aten::stft",
                           "aten::svd",
                           "aten::trace",
                           "aten::triangular_solve",
                           "aten::triplet_margin_loss",
                           "aten::view_as_complex"};
  return names;
}

const Names& torch_cpu_widest() {
  static const Names names{"aten::cat", "aten::index_copy", "aten::stack"};
  return names;
}

const Names& torch_cuda_lower_precision() {
  static const Names names{"aten::_convolution",
                           "aten::_scaled_dot_product_flash_attention",
                           "aten::_thnn_fused_gru_cell",
                           "aten::_thnn_fused_lstm_cell",
                           "aten::addbmm",
                           "aten::addmm",
                           "aten::addmv",
                           "aten::addr",
                           "aten::baddbmm",
                           "aten::bmm",
                           "aten::chain_matmul",
                           "aten::conv1d",
                           "aten::conv2d",
                           "aten::conv3d",
                           "aten::conv_tbc",
                           "aten::conv_transpose1d",
                           "aten::conv_transpose2d",
                           "aten::conv_transpose3d",
                           "aten::convolution",
                           "aten::cudnn_convolution",
                           "aten::cudnn_convolution_transpose",
                           "aten::einsum",
                           "aten::gru_cell",
                           "aten::linalg_multi_dot",
                           "aten::linalg_vecdot",
                           "aten::linear",
                           "aten::lstm_cell",
                           "aten::matmul",
                           "aten::mm",
                           "aten::mv",
                           "aten::prelu",
                           "aten::rnn_relu_cell",
                           "aten::rnn_tanh_cell",
                           "aten::scaled_dot_product_attention"};
  return names;
}

const Names& torch_cuda_fp32() {
  static const Names names{"aten::_upsample_bicubic2d_aa",
                           "aten::_upsample_bilinear2d_aa",
                           "aten::_upsample_nearest_exact1d",
                           "aten::_upsample_nearest_exact2d",
                           "aten::_upsample_nearest_exact3d",
                           "aten::acos",
                           "aten::asin",
                           "aten::binary_cross_entropy_with_logits",
                           "aten::cdist",
                           "aten::cosh",
                           "aten::cosine_embedding_loss",
                           "aten::cosine_similarity",
                           "aten::dist",
                           "aten::erfinv",
                           "aten::exp",
                           "aten::expm1",
                           "aten::frobenius_norm",
                           "aten::group_norm",
                           "aten::hinge_embedding_loss",
                           "aten::huber_loss",
                           "aten::kl_div",
                           "aten::l1_loss",
                           "aten::layer_norm",
                           "aten::log",
                           "aten::log10",
                           "aten::log1p",
                           "aten::log2",
                           "aten::logsumexp",
                           "aten::margin_ranking_loss",
                           "aten::mse_loss",
                           "aten::multi_margin_loss",
                           "aten::multilabel_margin_loss",
                           "aten::native_layer_norm",
                           "aten::nll_loss",
                           "aten::nll_loss2d",
                           "aten::norm.Scalar",
                           "aten::norm.ScalarOpt_dim",
                           "aten::nuclear_norm",
                           "aten::pdist",
                           "aten::poisson_nll_loss",
                           "aten::pow",
                           "aten::reciprocal",
                           "aten::renorm",
                           "aten::rms_norm",
                           "aten::rsqrt",
                           "aten::sinh",
                           "aten::smooth_l1_loss",
                           "aten::soft_margin_loss",
                           "aten::softplus",
                           "aten::tan",
                           "aten::triplet_margin_loss",
                           "aten::upsample_bicubic2d",
                           "aten::upsample_bilinear2d",
                           "aten::upsample_linear1d",
                           "aten::upsample_nearest1d",
                           "aten::upsample_nearest2d",
                           "aten::upsample_nearest3d",
                           "aten::upsample_trilinear3d"};
  return names;
}

const Names& torch_cuda_fp32_result() {
  static const Names names{"aten::cumprod",
                           "aten::cumsum",
                           "aten::linalg_matrix_norm",
                           "aten::linalg_vector_norm",
                           "aten::log_softmax",
                           "aten::prod",
                           "aten::softmax",
                           "aten::sum"};
  return names;
}

const Names& torch_cuda_widest() {
  static const Names names{"aten::addcdiv",   "aten::addcmul",      "aten::atan2",
                           "aten::bilinear",  "aten::cross",        "aten::dot",
                           "aten::vdot",      "aten::grid_sampler", "aten::index_put",
                           "aten::tensordot", "aten::scatter_add"};
  return names;
}

const Names& torch_cuda_banned() {
  static const Names names{"aten::binary_cross_entropy"};
  return names;
}

const Names& sensitive_fp32() {
  static const Names names{"aten::logcumsumexp", "aten::std", "aten::std_mean", "aten::var",
                           "aten::var_mean"};
  return names;
}

const Names& sensitive_fp32_result() {
  static const Names names{"aten::mean", "aten::nanmean", "aten::nansum"};
  return names;
}

const Names& further_cpu_lower_precision() {
  static const Names names{"aten::addmv", "aten::chain_matmul", "aten::linalg_multi_dot",
                           "aten::mv"};
  return names;
}

}  // namespace gradus::amp::internal
