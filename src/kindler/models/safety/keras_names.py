"""What the configuration of a Keras model may name without trust: classes and functions, of Keras 2 and 3.

They compute from numbers and from words in the configuration. Left out are layers that hold code or load
files (Lambda, TFSMLayer, TorchModuleWrapper, JaxLayer, FlaxLayer, DenseFeatures) and operations that take
functions (Map, Scan, Cond). What a later Keras adds needs trust until it is named here.
"""

from __future__ import annotations

_CLASSES = """
    AUC AWQDTypePolicy AbsMaxQuantizer AbstractRNNCell Accuracy Activation ActivityRegularization
    Adadelta Adafactor Adagrad Adam AdamW Adamax AdaptiveAveragePooling1D AdaptiveAveragePooling2D
    AdaptiveAveragePooling3D AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D Add
    AdditiveAttention AlphaDropout Attention AugMix AutoContrast Average AveragePooling1D
    AveragePooling2D AveragePooling3D AvgPool1D AvgPool2D AvgPool3D BatchNormalization Bidirectional
    BinaryAccuracy BinaryCrossentropy BinaryFocalCrossentropy BinaryIoU CTC CategoricalAccuracy
    CategoricalCrossentropy CategoricalFocalCrossentropy CategoricalGeneralizedCrossEntropy
    CategoricalHinge CategoryEncoding CenterCrop Circle Concatenate ConcordanceCorrelation Constant
    Constraint ContrastLimitedAdaptiveHistogramEqualization Conv1D Conv1DTranspose Conv2D
    Conv2DTranspose Conv3D Conv3DTranspose ConvLSTM1D ConvLSTM2D ConvLSTM3D Convolution1D
    Convolution1DTranspose Convolution2D Convolution2DTranspose Convolution3D Convolution3DTranspose
    CosineDecay CosineDecayRestarts CosineSimilarity Cropping1D Cropping2D Cropping3D CustomScaleLayer
    CutMix DTypePolicy DTypePolicyMap Dense DepthwiseConv1D DepthwiseConv2D Dice Discretization Dot
    Dropout ELU EinsumDense Embedding Equalization ExponentialDecay F1Score FBetaScore FalseNegatives
    FalsePositives Flatten Float8QuantizationConfig FloatDTypePolicy Ftrl Functional GPTQDTypePolicy GRU
    GRUCell GaussianDropout GaussianNoise GlobalAveragePooling1D GlobalAveragePooling2D
    GlobalAveragePooling3D GlobalAvgPool1D GlobalAvgPool2D GlobalAvgPool3D GlobalMaxPool1D
    GlobalMaxPool2D GlobalMaxPool3D GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D
    GlorotNormal GlorotUniform GroupNormalization GroupQueryAttention HashedCrossing Hashing HeNormal
    HeUniform Hinge Huber Identity IdentityInitializer Initializer InputLayer Int4DTypePolicy
    Int4QuantizationConfig Int8QuantizationConfig IntegerLookup InverseTimeDecay IoU KLDivergence L1
    L1L2 L2 LSTM LSTMCell Lamb Layer LayerNormalization LeakyReLU LearningRateSchedule LecunNormal
    LecunUniform Lion LocallyConnected1D LocallyConnected2D LogCosh LogCoshError Loss
    LossFunctionWrapper LossScaleOptimizer Masking MaxNorm MaxNumBoundingBoxes MaxPool1D MaxPool2D
    MaxPool3D MaxPooling1D MaxPooling2D MaxPooling3D Maximum Mean MeanAbsoluteError
    MeanAbsolutePercentageError MeanIoU MeanMetricWrapper MeanRelativeError MeanSquaredError
    MeanSquaredLogarithmicError MeanTensor MelSpectrogram Metric MinMaxNorm Minimum MixUp Model
    MultiHeadAttention MultiOptimizer Multiply Muon Nadam NonNeg Normalization OneHotIoU OneHotMeanIoU
    Ones Optimizer OptimizerMap Orthogonal OrthogonalInitializer OrthogonalRegularizer PReLU
    PearsonCorrelation Permute PiecewiseConstantDecay Pipeline Poisson Policy PolynomialDecay Precision
    PrecisionAtRecall QuantizationConfig QuantizedDTypePolicy QuantizedFloat8DTypePolicy Quantizer
    R2Score RMSNormalization RMSprop RNN RadialConstraint RandAugment RandomBrightness
    RandomColorDegeneration RandomColorJitter RandomContrast RandomCrop RandomElasticTransform
    RandomErasing RandomFlip RandomFourierFeatures RandomGaussianBlur RandomGrayscale RandomHeight
    RandomHue RandomInvert RandomNormal RandomPerspective RandomPosterization RandomRotation
    RandomSaturation RandomSharpness RandomShear RandomTranslation RandomUniform RandomWidth RandomZoom
    ReLU Recall RecallAtPrecision Regularizer RepeatVector Rescaling Reshape Resizing
    ReversibleEmbedding RootMeanSquaredError SGD STFT STFTInitializer STFTSpectrogram ScheduleFreeAdamW
    SeedGenerator SensitivityAtSpecificity SeparableConv1D SeparableConv2D SeparableConvolution1D
    SeparableConvolution2D Sequential SharpnessAwareMinimization SimpleRNN SimpleRNNCell Softmax
    Solarization SparseCategoricalAccuracy SparseCategoricalCrossentropy SparseTopKCategoricalAccuracy
    SpatialDropout1D SpatialDropout2D SpatialDropout3D SpecificityAtSensitivity SpectralNormalization
    SquaredHinge StackedRNNCells StringLookup Subtract Sum SumOverBatchSizeMetricWrapper
    SyncBatchNormalization TextVectorization ThresholdedReLU TimeDistributed TopKCategoricalAccuracy
    TrueNegatives TruePositives TruncatedNormal Tversky UnitNorm UnitNormalization UpSampling1D
    UpSampling2D UpSampling3D VarianceScaling Wrapper ZeroPadding1D ZeroPadding2D ZeroPadding3D Zeros
    constant glorot_normal glorot_uniform he_normal he_uniform identity l1 l1_l2 l2 lecun_normal
    lecun_uniform max_norm min_max_norm non_neg ones orthogonal orthogonal_regularizer radial_constraint
    random_normal random_uniform stft truncated_normal unit_norm variance_scaling zeros
"""

_OPERATIONS = """
    Abs Absolute AdaptiveAveragePool AdaptiveMaxPool AffineTransform All AllClose Amax Amin Angle Any
    Append Arange Arccos Arccosh Arcsin Arcsinh Arctan Arctan2 Arctanh Argmax Argmin Argpartition
    Argsort Array ArraySplit AveragePool BatchNorm Bincount BitwiseAnd BitwiseInvert BitwiseLeftShift
    BitwiseNot BitwiseOr BitwiseRightShift BitwiseXor BroadcastTo CDist CTCDecode CTCLoss Cast Cbrt Ceil
    Celu Cholesky CholeskyInverse Clip Conj Conjugate Conv ConvTranspose ConvertToTensor Copy Corrcoef
    Correlate Cos Cosh CountNonzero CropImages Cross Cumprod Cumsum Deg2rad DepthToSpace DepthwiseConv
    Det Diag Diagflat Diagonal Diff Digitize Divide DivideNoNan DotProductAttention Dsplit Dstack Eig
    Eigh Einsum ElasticTransform Elu EmptyLike Equal Erf Erfc Erfinv Exp Exp2 ExpandDims Expm1
    ExtractPatches ExtractSequences FFT FFT2 Fabs Flip Fliplr Flipud Floor FloorDivide Fmax Fmin Fmod
    Fold Full FullLike GaussianBlur Gcd Gelu Geomspace GetItem Glu Greater GreaterEqual HSVToRGB
    HardShrink HardSigmoid HardSilu HardTanh Heaviside Histogram Hsplit Hstack Hypot I0 IFFT2 IRFFT
    ISTFT Imag InTopK Inner Inv IsIn Isclose Isfinite Isinf Isnan Isneginf Isposinf Isreal Kron
    LayerNorm Lcm Ldexp LeakyRelu LeftShift Less LessEqual Linspace Log Log10 Log1p Log2 LogSigmoid
    LogSoftmax Logaddexp Logaddexp2 Logdet LogicalAnd LogicalNot LogicalOr LogicalXor Logspace Logsumexp
    Lstsq LuFactor MapCoordinates Matmul MatrixRank Max MaxPool Median Meshgrid Min Mod Moments Moveaxis
    MultiHot NanToNum Nanargmax Nanargmin Nancumprod Nancumsum Nanmax Nanmean Nanmedian Nanmin
    Nanpercentile Nanprod Nanquantile Nanstd Nansum Nanvar Ndim Negative Nextafter Nonzero Norm
    Normalize NotEqual OneHot OnesLike Outer PSNR Pad PadImages Percentile PerspectiveTransform Pinv
    Polar Power Prod Ptp Qr Quantile RFFT RGBToGrayscale RGBToHSV RMSNorm Rad2deg Ravel Real Rearrange
    Reciprocal Relu Relu6 Repeat Resize RightShift Roll Rot90 Round Rsqrt SSIM SVD SaturateCast
    ScaleAndTranslate Scatter ScatterUpdate SearchSorted SegmentMax SegmentMin SegmentProd
    SegmentReduction SegmentSum Select Selu SeparableConv Sigmoid Sign Signbit Silu Sin Sinc Sinh Size
    Slice SliceUpdate Slogdet SobelEdges SoftShrink Softplus Softsign Solve SolveTriangular Sort
    SpaceToDepth SparsePlus SparseSigmoid Sparsemax Split Sqrt Square Squareplus Squeeze Stack Std
    StopGradient Swapaxes Take TakeAlongAxis Tan Tanh TanhShrink Tensordot Threshold Tile TopK Trace
    Transpose Trapezoid Tril Triu TrueDivide Trunc Unfold Unique UnravelIndex Unstack Vander Var Vdot
    View ViewAsComplex ViewAsReal Vsplit Vstack Where ZerosLike
"""

_FUNCTIONS = """
    BCE KLD MAE MAPE MSE MSLE acc accuracy bce binary_accuracy binary_crossentropy
    binary_focal_crossentropy categorical_accuracy categorical_crossentropy
    categorical_focal_crossentropy categorical_generalized_cross_entropy categorical_hinge ce celu
    circle concordance_correlation cosine_proximity cosine_similarity crossentropy ctc dice elu
    exponential gelu glu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh hinge huber
    kl_divergence kld kullback_leibler_divergence leaky_relu linear log_cosh log_sigmoid log_softmax
    logcosh mae mape mean_absolute_error mean_absolute_percentage_error mean_squared_error
    mean_squared_logarithmic_error mish mse msle pearson_correlation poisson relu relu6 selu sigmoid
    silu soft_shrink softmax softplus softsign sparse_categorical_accuracy
    sparse_categorical_crossentropy sparse_plus sparse_sigmoid sparse_top_k_categorical_accuracy
    sparsemax squared_hinge squareplus swish tanh tanh_shrink threshold top_k_categorical_accuracy
    tversky
"""

_TENSORFLOW = """
    __operators__.add __operators__.eq __operators__.getitem __operators__.ne argsort broadcast_to cast
    clip_by_value compat.v1.concat compat.v1.gather compat.v1.shape compat.v1.squeeze
    compat.v1.transpose concat einsum expand_dims fill gather identity image.resize linalg.diag
    linalg.diag_part linalg.matmul linalg.norm math.abs math.add math.argmax math.argmin math.ceil
    math.cos math.cumsum math.divide math.equal math.erf math.exp math.floor math.floordiv math.greater
    math.greater_equal math.l2_normalize math.less math.less_equal math.log math.log1p math.logical_and
    math.logical_not math.logical_or math.maximum math.minimum math.mod math.multiply math.negative
    math.not_equal math.pow math.reduce_all math.reduce_any math.reduce_logsumexp math.reduce_max
    math.reduce_mean math.reduce_min math.reduce_prod math.reduce_std math.reduce_sum
    math.reduce_variance math.round math.rsqrt math.sigmoid math.sign math.sin math.sqrt math.square
    math.subtract math.tanh math.top_k math.truediv nn.bias_add nn.dropout nn.elu nn.gelu
    nn.l2_normalize nn.leaky_relu nn.log_softmax nn.relu nn.relu6 nn.selu nn.sigmoid nn.silu nn.softmax
    nn.softplus nn.swish nn.tanh one_hot ones ones_like pad range rank repeat reshape reverse roll shape
    size slice sort split squeeze stack stop_gradient strided_slice tensordot tile transpose unstack
    where zeros zeros_like
"""

CLASSES = frozenset([*_CLASSES.split(), *_OPERATIONS.split()])
FUNCTIONS = frozenset(_FUNCTIONS.split())
TENSORFLOW = frozenset(_TENSORFLOW.split())
"""Symbols of TensorFlow that a TFOpLambda layer of Keras 2 may call."""
